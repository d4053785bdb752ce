#define QUIRE_ISA portable
#include "peak.inl"
