/* A Windows program that finds the archive attached to its own file, signed or not, and prints one tensor.
 *
 *     x86_64-w64-mingw32-gcc -O2 -o app.exe own_weights_windows.c && zcrecord attach app.exe model.zcr
 *     osslsigncode sign -certs cert.pem -key key.pem -in app.exe -out signed.exe
 */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <stdio.h>

#include "zcrecord.h"

int main(int argc, char **argv)
{
    WCHAR path[MAX_PATH];
    HANDLE file, mapping;
    LARGE_INTEGER size;
    const void *program = NULL;
    zcr_archive archive;
    zcr_tensor tensor;
    const float *weights;
    size_t i;

    if (argc < 2) {
        puts("ready");
        return 0;
    }
    GetModuleFileNameW(NULL, path, MAX_PATH);
    file = CreateFileW(path, GENERIC_READ, FILE_SHARE_READ, NULL, OPEN_EXISTING, 0, NULL);
    if (file == INVALID_HANDLE_VALUE || !GetFileSizeEx(file, &size)) {
        return 1;
    }
    mapping = CreateFileMappingW(file, NULL, PAGE_READONLY, 0, 0, NULL);
    if (mapping != NULL) {
        program = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
    }
    if (program == NULL) {
        return 1;
    }
    if (zcr_open_suffix(&archive, program, (size_t)size.QuadPart)) {
        fputs("no archive is attached to this program\n", stderr);
        return 2;
    }
    if (zcr_get(&archive, argv[1], &tensor) || (weights = zcr_f32(&tensor)) == NULL) {
        fprintf(stderr, "no float32 tensor is named %s\n", argv[1]);
        return 3;
    }
    for (i = 0; i < zcr_count(&tensor); i++) {
        printf("%g\n", (double)weights[i]);
    }
    printf("aligned to 64: %d\n", ((uintptr_t)weights & 63) == 0);
    return 0;
}
