"""Clusters: where training really runs, and how to see what it does there."""
