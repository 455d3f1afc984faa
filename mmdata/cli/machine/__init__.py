"""Commands about this machine and mmdata itself."""
