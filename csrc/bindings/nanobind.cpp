#include <nb_combined.cpp>
