"""Jobs on many machines: started through Slurm or ssh, watched, looked at and stopped."""
