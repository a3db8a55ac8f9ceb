"""Steps, moments and buffers, committed and resumed as one."""
