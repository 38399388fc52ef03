// A pretended NVRTC. It compiles every source to the same few bytes.
#include <cstddef>
#include <cstring>

extern "C" {
const char* nvrtcGetErrorString(int) {
  return "pretended";
}
int nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 0;
  return 0;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return 0;
}
int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80, archs[1] = 90, archs[2] = 100;
  return 0;
}
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = program;
  return 0;
}
int nvrtcDestroyProgram(void**) {
  return 0;
}
int nvrtcCompileProgram(void*, int, const char* const*) {
  return 0;
}
int nvrtcGetCUBINSize(void*, size_t* bytes) {
  *bytes = 64;
  return 0;
}
int nvrtcGetCUBIN(void*, char* cubin) {
  std::memset(cubin, 0, 64);
  std::memcpy(cubin, "\177ELF", 4);
  return 0;
}
int nvrtcGetProgramLogSize(void*, size_t* bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetProgramLog(void*, char* log) {
  *log = 0;
  return 0;
}
}
