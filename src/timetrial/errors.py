"""The two ways a command ends badly. Both print one line; neither shows a traceback.

What is wrong, where, and what to change: say all three in the message.
"""


class UserError(Exception):
    """Bad input: an unknown name, an impossible plan, an unreadable file. Exit code 2."""

    exit_code = 2


class RunFailed(Exception):
    """The input was fine, the run was not: loss became NaN, the target was missed. Exit code 1."""

    exit_code = 1
