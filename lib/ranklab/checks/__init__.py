"""The exercise checks: one module for each lab."""
