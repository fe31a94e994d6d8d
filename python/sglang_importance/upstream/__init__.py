"""The interface to sglang: symbols that we rely on, hooks that we install, and refusals to launch."""
