"""KV heads apart: slots for single heads of a page, and pages fetched ahead by how far a head looks back."""
