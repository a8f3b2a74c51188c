"""Plays kvpatch on a GPU that is at hand for minutes: `experiments/gpu/run.sh`."""
