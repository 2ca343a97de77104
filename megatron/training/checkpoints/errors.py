"""The error of everything here that a user can put right: tools print it as one line and end with status 2.

raise ConversionError("what was found, what was wanted, what to do")
"""


class ConversionError(Exception):
    """A checkpoint that cannot be read or converted, or an output that cannot be written."""
