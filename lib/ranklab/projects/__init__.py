"""The scenario of each lab: `python -m ranklab.projects.<idea>`, also under torchrun."""
