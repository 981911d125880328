"""What tests of ar2diff, and of programs built on it, are made with: tiny models, and hubs on the loopback."""
