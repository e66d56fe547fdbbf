"""What notebooks 00 and 05 to 07 show, say and record, section by section; what they compute is
elsewhere."""
