"""What attention said of pages, accumulated on nodes."""
