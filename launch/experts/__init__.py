"""moeserve experts: commands that look at, and change, where experts live."""
