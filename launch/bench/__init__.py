"""`moeserve bench ...`: what is measured, one file a command; `app.py` is the command line."""
