"""The operations: each module checks its arguments, then runs its kernel or its NumPy twin."""
