"""Tasks, tokenizer and grading of the embedded retrieval model, whose weights `sgl_importance` ships."""
