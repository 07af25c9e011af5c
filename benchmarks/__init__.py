"""The benchmark suite of cupy_kvcanary: `kvcanary bench`, or from a checkout `python -m cupy_kvcanary bench`.

Each `bench_<name>.py` declares cases (`cases()`); `runner` measures and checks them all the same way; `report` and
`plots` write what was measured.
"""
