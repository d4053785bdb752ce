#define QUIRE_ISA portable
#include "linear.inl"
