"""`kvferry chat`: a terminal client of the router's HTTP API."""
