"""Other caches as consumers of ``get_importance``; none of them is a dependency."""
