"""Entry point of the sglang plugin."""


def register() -> None:
    return None
