"""A checkpoint: what lies in its files, which tensor feeds which parameter, opening, converting, restoring it."""
