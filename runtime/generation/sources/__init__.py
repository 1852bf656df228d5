"""What a decoder reads of the prompts behind which it writes, on the host or on a device."""
