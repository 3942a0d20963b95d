#!/bin/sh
# The C++ compiler for Horovod's build: Horovod's CMake files pin C++14 while
# torch's headers need C++20. The last -std flag on the command line wins.
exec g++ "$@" -std=gnu++20
