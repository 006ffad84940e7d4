"""What differs on a platform; imported only where the platform's software is."""
