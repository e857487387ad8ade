"""initwarm: tune FlashInfer's kernels before the serving container starts, prove the result, and meet at a barrier."""

__version__ = "0.1.0"
