"""What the training of all models shares: the decoder, its attention masks, its files."""
