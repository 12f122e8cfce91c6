"""What happened: compilations, profiles, statistics, attention received."""
