"""Pages of KV cache on disk that are checked on every read: a wrong page can never be served."""
