"""What the pages of a server and of a fleet share: style, scripts, and how their files are sent."""
