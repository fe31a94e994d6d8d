"""What the training of both embedded models shares: the decoder, its attention masks, its files."""
