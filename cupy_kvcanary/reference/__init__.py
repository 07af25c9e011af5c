"""The NumPy backend: each kernel's contract, vectorised, under the launcher's keyword names."""
