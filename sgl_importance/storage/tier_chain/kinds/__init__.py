"""What a tier of the chain is made of: memory, a mapped file, files, a Mooncake store, a HiCache backend."""
