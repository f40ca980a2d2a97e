"""What one request costs with each method, in bytes and time: for `kvferry plan` and the method `auto`."""
