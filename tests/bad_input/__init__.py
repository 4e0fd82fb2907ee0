"""Bad inputs of every public function and program, in tables by area, and the test of all rows."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false
