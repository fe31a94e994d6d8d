"""The modes of sglang that are refused under ``--kv-policy observe`` and ``importance``, as not tested."""
