// CUDA's driver, as far as Triton's launcher and PyTorch ask it.
#include <stddef.h>

extern int stand_in_work(void *stream);
extern int cudaDeviceGetAttribute(int *value, int attribute, int device);
static void *const SOMETHING = (void *)64;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned num_attributes;
} Launch;

int cuInit(unsigned flags) { return 0; }

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = SOMETHING;
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = SOMETHING;
  return 0;
}

int cuCtxGetDevice(int *device) {
  *device = 0;
  return 0;
}

int cuModuleLoadData(void **module, const void *image) {
  *module = SOMETHING;
  return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = SOMETHING;
  return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : 0; // threads of a block, registers
  return 0;
}

int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                   unsigned threads_y, unsigned threads_z, unsigned shared, void *stream,
                   void **arguments, void **more) {
  return stand_in_work(stream);
}

int cuLaunchKernelEx(const Launch *launch, void *function, void **arguments, void **more) {
  return stand_in_work(launch->stream);
}

int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) {
  *count = 1;
  return 0;
}

int cuPointerGetAttribute(unsigned long long *value, int attribute, unsigned long long pointer) {
  *value = pointer;
  return 0;
}

int cuGetErrorString(int error, const char **text) {
  *text = "an error of the stand-in";
  return 0;
}

int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }
