#define QUIRE_ISA portable
#include "quantize.inl"
