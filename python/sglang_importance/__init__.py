"""The SGLang side: the only package that imports sglang."""
