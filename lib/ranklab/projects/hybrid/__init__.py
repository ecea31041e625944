"""Lab 12's project. So far: compare.py, all layouts of one model in one table."""
