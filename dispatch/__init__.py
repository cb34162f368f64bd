"""HOW tokens travel to the ranks that hold their experts, and back."""
