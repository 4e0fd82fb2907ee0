"""Bad inputs of every public function and program, in tables by area, and the test of all rows."""
