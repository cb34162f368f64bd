"""`moeserve doctor`: what this machine has, what it lacks for which purpose, and what to do."""
