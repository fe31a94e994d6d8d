"""What an operator may choose: one record, in groups by feature, and where each choice is written."""
