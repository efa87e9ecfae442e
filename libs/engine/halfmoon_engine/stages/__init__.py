"""Cut models into stages: runs of layers that engines of a group compute."""
