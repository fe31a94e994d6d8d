"""Operations that the HTTP process asks a scheduler for, and their answers."""
