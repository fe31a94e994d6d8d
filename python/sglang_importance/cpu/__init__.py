"""What unmodified sglang lacks on a machine without an accelerator."""


def activate() -> None:
    return None
