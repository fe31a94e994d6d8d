"""The laboratory of sgl-importance: replays, studies, sizes and models that say what serving gains."""
