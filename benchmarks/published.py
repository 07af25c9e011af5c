"""The peer's times where it cannot be run beside ours: published figures, another run.

sglang 0.5.23's kv-canary on one NVIDIA H200 (CUDA 13.0, torch 2.11, Triton 3.6), through its own Python launchers; GPU
time by graph replay, host time of eager calls. A decode step: every request extends by 1, pages of 16.
"""

from __future__ import annotations

SOURCE = "published figures, another run"

# By requests and prefix.
OFFSETS = {1: 3.5, 32: 9.5, 256: 9.7, 1024: 10.7, 4096: 41.8}
OFFSETS_MOST_REQUESTS = 4096
"""It refuses more."""
PLAN = {(1, 1024): 6.1, (32, 1024): 13.2, (256, 1024): 16.7, (256, 4096): 26.6, (1024, 1024): 30.6, (4096, 256): 71.4}
VERIFY = {(1, 1024): 3.4, (32, 1024): 3.6, (256, 1024): 11.8, (256, 4096): 53.1, (1024, 1024): 53.0, (4096, 256): 52.8}

VERIFY_REAL_KV = {(256, 4096, 4, 32): 176.4, (256, 1024, 1, 2048): 322.8}
"""By requests, prefix, real-KV sources and hashed bytes of each; one tag."""

WRITE = {(1, 1): 2.9, (32, 1): 3.0, (256, 1): 3.1, (1024, 1): 3.8, (4096, 1): 6.1, (1, 4096): 1055.0}
"""By requests and tokens of each."""

STEP = {
    (32, 1024, 0, 0): {"device_us": 37.9, "host_us": 415.0},
    (256, 4096, 0, 0): {"device_us": 231.7, "host_us": 497.0},
    (64, 65536, 0, 0): {"device_us": 767.7, "host_us": 404.0},
    (256, 4096, 4, 32): {"device_us": 767.5},
    (256, 1024, 1, 2048): {"device_us": 1423.0},
}
"""Plan once, verify and write for K and V, head and tail; by requests, prefix, sources and hashed bytes of each."""

OFFSETS_HOST_US = (39, 65)
"""Least and most of an eager offsets call."""
