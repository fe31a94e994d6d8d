"""The SGLang side: every file here imports sglang, nothing else does."""
