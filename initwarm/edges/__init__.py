"""The only modules that touch a file, a clock, a process, a network or a device."""
